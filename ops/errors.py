"""The errors of the package. Each says what was got, what is allowed, and what to do."""


class TopkxError(ValueError):
    """An argument, a group or a setting that the package refuses; nothing was written."""


class BackendUnavailableError(TopkxError):
    """The machine lacks what a backend needs (CuTe DSL, a Hopper GPU, peer access)."""


class ExchangeTimeoutError(RuntimeError):
    """A peer's words did not arrive within ``VLLM_TOPKX_TIMEOUT_S``.

    Attributes:
        row: the first query row that was waited for.
        source_rank: the rank in the group whose words are missing.
        epoch: the epoch (call number of that row, modulo 2**32) that was waited for.
        round: 1 for the exchange of the best ``local_topk`` candidates, 2 for a rescue.
    """

    def __init__(self, group: str, row: int, source_rank: int, epoch: int, round: int, seconds: float) -> None:
        self.group, self.row, self.source_rank = group, row, source_rank
        self.epoch, self.round, self.seconds = epoch, round, seconds
        super().__init__(
            f"top-K exchange of group {group!r}: rank {source_rank} did not deliver row {row} "
            f"(epoch {epoch}, round {round}) within {seconds:g} s; it has died, hangs, or makes other "
            f"calls than this rank. The exchange is unusable from here on: restart the group "
            f"(VLLM_TOPKX_TIMEOUT_S sets the limit)"
        )

    def __reduce__(self):  # a RuntimeError pickles its message, which is not our signature
        args = (self.group, self.row, self.source_rank, self.epoch, self.round, self.seconds)
        return type(self), args
