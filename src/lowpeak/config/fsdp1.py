"""FSDP1's settings as FSDP2's: the same sharding where FSDP2 has it, an error where it has not.

The names are accelerate's without their prefix (`fsdp_` in a file, `FSDP_` in the environment, none in TrainingArguments).
The mapping is that of `accelerate to-fsdp2`, but for the strategies that it maps to another sharding without a word:
NO_SHARD shards nothing, and the HYBRID ones need a mesh of hosts and devices.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from lowpeak.errors import ArgumentError

STRATEGIES = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
)  # numbered from 1 by torch
_GONE = (
    "backward_prefetch",
    "backward_prefetch_policy",
    "forward_prefetch",
    "limit_all_gathers",
    "sync_module_states",
    "use_orig_params",
)
_PREFIX = "FSDP_"


@dataclass(frozen=True)
class Converted:
    """Settings for FSDP2, and what changed on the way, in words."""

    settings: dict[str, Any]
    changes: tuple[str, ...]

    def sentence(self, where: str) -> str:
        """The one warning that a conversion gives."""
        return (
            f"{where} asks for FSDP1, which lowpeak runs as FSDP2: {'; '.join(self.changes)}. Say fsdp_version 2 "
            "(`accelerate to-fsdp2` rewrites a file) to have no warning."
        )


def is_fsdp1(settings: Mapping[str, Any], default: int = 1) -> bool:
    """Whether the settings ask for version 1; `default` is what the reader of the settings takes when they do not say."""
    return str(settings.get("fsdp_version", settings.get("version", default))) != "2"


def convert_fsdp1(settings: Mapping[str, Any]) -> Converted:
    """The settings for FSDP2; ArgumentError where FSDP2 has no such sharding. Names that FSDP2 shares are kept as they are."""
    kept = {name: value for name, value in settings.items() if name not in (*_GONE, "sharding_strategy")}
    said = settings.get("sharding_strategy")
    said = settings.get("reshard_after_forward", STRATEGIES[0]) if said is None else said
    strategy = _strategy(said)
    reshard = strategy == "FULL_SHARD"
    changes = [f"sharding {strategy} is now reshard_after_forward={str(reshard).lower()}"]
    if str(kept.get("state_dict_type", "")).upper() == "LOCAL_STATE_DICT":
        kept["state_dict_type"] = "SHARDED_STATE_DICT"
        changes.append("state_dict_type LOCAL_STATE_DICT is now SHARDED_STATE_DICT")
    gone = [name for name in _GONE if name in settings]
    if gone:
        changes.append(f"{', '.join(gone)} left out, FSDP2 has no such settings")
    return Converted({**kept, "reshard_after_forward": reshard}, tuple(changes))


def convert_environment(environ: MutableMapping[str, str]) -> Converted | None:
    """Put FSDP2's settings in the place of FSDP1's in the environment that accelerate reads; None where there are none."""
    settings = {
        name.removeprefix(_PREFIX).lower(): value for name, value in environ.items() if name.startswith(_PREFIX)
    }
    if environ.get("ACCELERATE_USE_FSDP", "false").lower() not in ("true", "1") or not is_fsdp1(settings):
        return None
    converted = convert_fsdp1(settings)
    for name in settings:
        del environ[_PREFIX + name.upper()]
    for name, value in {**converted.settings, "version": 2}.items():
        environ[_PREFIX + name.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    return converted


def _strategy(said: Any) -> str:
    """A sharding strategy's name, however it was said; ArgumentError for one that FSDP2 does not have."""
    text = str(said).upper()
    if isinstance(said, bool) or text in ("TRUE", "FALSE"):
        return STRATEGIES[0 if text == "TRUE" else 1]
    name = STRATEGIES[int(text) - 1] if text.isdigit() and 0 < int(text) <= len(STRATEGIES) else text
    if name in STRATEGIES[:2]:
        return name
    remedies = {
        "NO_SHARD": "it shards nothing: use ddp, or FULL_SHARD",
        "HYBRID_SHARD": "FSDP2 replicates across hosts by a parallelism config: use the preset hsdp",
        "HYBRID_SHARD_ZERO2": "FSDP2 replicates across hosts by a parallelism config: use the preset hsdp",
    }
    remedy = remedies.get(name, f"FSDP1 has {', '.join(STRATEGIES)}")
    raise ArgumentError(f"the FSDP1 sharding strategy {said} cannot be run as FSDP2: {remedy}.")
