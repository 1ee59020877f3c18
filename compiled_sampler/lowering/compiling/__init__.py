"""How a stage gets its code: from disk, compiled here, in the background, or by other processes."""
