"""What the server of child processes does once, so that no child does it again: imports, and transformers' tables.

Nothing here starts a thread: a thread would not live on in a forked child.
"""

from __future__ import annotations

import gc
import tempfile
import threading

import deepspeed  # noqa: F401  # this and the others are imported for the children
import peft  # noqa: F401
import torch.distributed.tensor  # noqa: F401
from torch.distributed.fsdp import FSDPModule  # noqa: F401
from tqdm import tqdm

from lowpeak import (  # noqa: F401
    GRPOTrainer,
    OnlineDPOTrainer,
    PPOTrainer,
    RewardTrainer,
    RLOOTrainer,
    SFTTrainer,
)
from lowpeak.parallel.fsdp2 import Fsdp2  # noqa: F401
from lowpeak.parallel.zero import Zero  # noqa: F401
from tiny_models import tiny_model

with tempfile.TemporaryDirectory() as folder:
    tiny_model().save_pretrained(folder)

# tqdm's own lock is a semaphore of the system, which a killed process would leave behind.
tqdm.set_lock(threading.RLock())
# A child's collector would touch, and so copy, all that was imported.
gc.freeze()
