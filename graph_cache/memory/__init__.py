"""The tensors that graphs read and write: static buffers, addresses of a caller, copies, pinned memory."""
