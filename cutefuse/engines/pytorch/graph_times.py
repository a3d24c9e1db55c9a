"""Times on the GPU of this machine through PyTorch: those of tiles, and of small graphs of standard operators."""

from __future__ import annotations

from functools import cached_property

import onnx
import torch

from cutefuse.engines.pytorch.lock import alone
from cutefuse.engines.pytorch.run import TorchEngine
from cutefuse.engines.pytorch.tile_times import Repeated, TileTimer, in_turns


class GpuTimer(TileTimer):
    """See `cutefuse.timing.calls.Timer`."""

    @cached_property
    def plain_machine(self) -> str:
        return f"{self.gpu}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"

    def model_us(self, model: onnx.ModelProto, mode: str) -> float:
        engine = TorchEngine.build(model, mode, self.device)
        # Its own graph holds one inference, whose launch from the host would be most of the time.
        with alone():
            return in_turns({0: Repeated(engine.run_outside_graph, self.effort)}, self.effort.rounds)[0]
