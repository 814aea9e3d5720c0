"""Online RL post-training for LLMs that fits the memory you have."""

import os
import sys
from typing import Any

from lowpeak.exports import lazy_exports

__version__ = "0.2.0"

# torch's OpenMP runtime reads OMP_WAIT_POLICY once, when torch is loaded. With PASSIVE, idle threads sleep and leave the
# cores to other processes. Child processes inherit the variable.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_load, __dir__, __all__ = lazy_exports(__name__, __file__)

# TRL's other public names.
_TRL_NAMES = (
    *("add_response_schema", "apply_chat_template", "clone_chat_template", "create_reference_model", "extract_prompt"),
    *("get_training_chat_template", "init_zero_verbose", "is_conversational", "is_conversational_from_value"),
    *("maybe_apply_chat_template", "maybe_convert_to_chatml", "maybe_extract_prompt", "unpair_preference_dataset"),
    *("maybe_unpair_preference_dataset", "pack_dataset", "prepare_multimodal_messages", "supports_tool_calling"),
    *("BEMACallback", "LogCompletionsCallback", "RichProgressCallback", "SyncRefModelCallback", "WeaveCallback"),
)


def __getattr__(name: str) -> Any:
    if name in _TRL_NAMES:
        # `from lowpeak import name` would replace the message of an AttributeError.
        raise ImportError(f"lowpeak has no {name}: `from trl import {name}` works next to lowpeak's trainers.")
    return _load(name)
