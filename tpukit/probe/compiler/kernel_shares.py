"""What a trace notes of fused attention, into which the compiler does not see."""

from torch import Tensor

from tpukit.hardware.backend import TorchOps
from tpukit.hardware.kernels.flash_attention import share_of_tiles


class KernelShares(TorchOps):
    """Goes before a backend among the bases of a tracing one."""

    kernel_shares: list[float]
    """Part of the score tiles that each fused attention so far computes."""

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        *,
        causal: bool = False,
        starts: Tensor | None = None,
    ) -> Tensor:
        if self.can_fuse(query, key, bias, starts, causal=causal):  # type: ignore[attr-defined]
            self.kernel_shares.append(share_of_tiles(query, causal=causal))
        return super().attention(query, key, value, bias, causal=causal, starts=starts)


def mean_share(shares: list[float]) -> float:
    """The mean of these shares; 0 without any."""
    return sum(shares) / max(1, len(shares))
