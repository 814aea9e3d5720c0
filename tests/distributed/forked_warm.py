"""What the server of forked ranks imports: all that a run imports, so that no rank has to."""

from __future__ import annotations

import setups  # noqa: F401
import torch.distributed.tensor  # noqa: F401
from torch.distributed.fsdp import FSDPModule  # noqa: F401

from lowpeak import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # noqa: F401
from lowpeak.strategies import fsdp2, zero  # noqa: F401
