"""What can go wrong that is not a wrong argument."""


class CaptureError(RuntimeError):
    """A variant could not be captured; its cause is chained, the cache is as it was before.

    Attributes:
        name: the registered callable.
        bucket: the rows it was captured with.
    """

    def __init__(self, name: str, bucket: int, cause: Exception) -> None:
        """Says what failed and what still works.

        Args:
            name: the registered callable.
            bucket: the rows it was captured with.
            cause: what the warm-up or the capture raised.
        """
        super().__init__(
            f"{name}[{bucket}] could not be captured: {type(cause).__name__}: {cause}; a captured callable must not "
            "wait for the device (.item(), .cpu(), nonzero, a boolean index) and must return a NamedTuple of tensors. "
            "Other variants stay usable and this one is served without a graph; correct the callable, then warmup again"
        )
        self.name = name
        self.bucket = bucket
