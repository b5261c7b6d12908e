"""How onnxruntime's CUDA provider is set up. A plan records it: which kernels run, and their scratch, hang on it."""

from dataclasses import dataclass

from memonger.errors import PlanError

SEARCHES = ("heuristic", "exhaustive", "default")
GRAPHS = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class Cuda:
    """Settings of the CUDA provider.

    Attributes:
        convolution_search: How cuDNN's algorithm for a convolution is chosen. ``heuristic``: by cuDNN's own rules, the
            same each time. ``exhaustive``: by timing them in the first run (onnxruntime's own default), which takes
            scratch for each one tried, and may choose another in the next session: then scratch and last bits differ.
            ``default``: one algorithm for all.
        max_workspace: Whether a convolution may take as much scratch as it likes; else 32 MiB at most.
        tf32: Whether products of float32 may be computed in TF32 (10 bits of mantissa), as onnxruntime does.
        deterministic: Whether kernels that sum in no fixed order (some reductions) are left out where there are others.
            Off is onnxruntime's own default; then what is recomputed may differ in the last bits.
    """

    convolution_search: str = "heuristic"
    max_workspace: bool = True
    tf32: bool = True
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.convolution_search not in SEARCHES:
            raise PlanError(
                f"convolution_search={self.convolution_search!r} can't be: there are {', '.join(SEARCHES)}."
            )

    def options(self) -> dict[str, str]:
        """The provider options of onnxruntime that say the same; ``deterministic`` is a session's."""
        return {
            "cudnn_conv_algo_search": self.convolution_search.upper(),
            "cudnn_conv_use_max_workspace": str(int(self.max_workspace)),
            "use_tf32": str(int(self.tf32)),
        }
