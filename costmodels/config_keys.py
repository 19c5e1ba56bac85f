"""The keys of a model's config: read one by one, checked, and accounted for.

A config is data from strangers in a format that grows every month. So each family reads the keys
that it knows, and what is left over is looked at once more: a key that was not read and whose name
speaks of layers, heads, experts or sizes may change the model, and is refused rather than guessed.
"""

import math
import re
from collections.abc import Mapping
from typing import NoReturn

MAX_COUNT = 2**31 - 1  # chosen: above any real size, below numbers that exhaust memory

_SPEAKS_OF_SHAPE = re.compile(
    "layer|head|expert|size|dim|width|hidden|rank|inner|intermediate|ffn|bias|moe|window|tie_",
    re.IGNORECASE,
)
# Keys of Hugging Face's base class and of published configs that sound like shapes but are none.
_HARMLESS = frozenset(
    {
        "_experts_implementation_internal",
        "apply_residual_connection_post_layernorm",  # where the residual is taken, not its size
        "bias_dropout_fusion",
        "chunk_size_feed_forward",
        "ep_size",
        "experts_implementation",
        "hidden_dropout",
        "hidden_dropout_prob",
        "output_hidden_states",
        "scale_attn_by_inverse_layer_idx",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "tie_encoder_decoder",
    }
)


class ConfigKeys:
    """A config that remembers which of its keys were read.

    Every method takes the name a key has in the config, in several spellings where families
    differ, and raises `ValueError` naming that key when its value is missing or senseless.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self._read: set[str] = set()

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number; a null means the default, as it does for Hugging Face.

        Args:
            names: Spellings of the key; those present must agree.
            default: What a missing key means; None where it has to be there.
            least: Smallest legal value.

        """
        value = self.optional_count(*names, least=least)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"the key {_joined(names)} is missing")
        return value

    def optional_count(self, *names: str, least: int = 1) -> int | None:
        """Return a whole number, None where the key is missing or null."""
        name, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(name, "a whole number", value)
        if not least <= value <= MAX_COUNT:
            raise ValueError(f"{name} must lie between {least} and {MAX_COUNT}, not {value}")
        return value

    def number(self, *names: str, default: float, or_zero: bool = False) -> float:
        """Return a finite number above zero, or zero itself where that has a meaning."""
        name, value = self._find(names)
        if value is None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if or_zero and is_number and value == 0:
            return 0.0
        if not is_number or not 0 < value < math.inf:  # type: ignore[operator]  # checked just now
            _refuse(name, "a number from 0 up" if or_zero else "a number above 0", value)
        return float(value)  # type: ignore[arg-type]

    def flag(self, *names: str, default: bool) -> bool:
        """Return true or false."""
        name, value = self._find(names)
        if value is None:
            return default
        if not isinstance(value, bool):
            _refuse(name, "true or false", value)
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """Return a word."""
        name, value = self._find(names)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"the key {_joined(names)} is missing")
        if not isinstance(value, str):
            _refuse(name, "text", value)
        return value

    def items(self, name: str) -> list[object] | None:
        """Return a list, None where the key is missing or null."""
        _, value = self._find((name,))
        if value is not None and not isinstance(value, list):
            _refuse(name, "a list", value)
        return value

    def table(self, name: str) -> Mapping[str, object] | None:
        """Return an object, None where the key is missing or null."""
        _, value = self._find((name,))
        if value is not None and not isinstance(value, Mapping):
            _refuse(name, "an object", value)
        return value

    def expect(self, name: str, *allowed: object, why: str) -> None:
        """Refuse any value but those listed; a missing or null key passes."""
        _, value = self._find((name,))
        if value is not None and not any(
            value == choice and type(value) is type(choice) for choice in allowed
        ):
            choices = " or ".join(_shown(choice) for choice in allowed)
            raise ValueError(f"{name} must be {choices}, not {_shown(value)}: {why}")

    def skip(self, *names: str) -> None:
        """Take note of keys whose value follows from others or changes nothing here."""
        self._read.update(names)

    def refuse_unread(self) -> None:
        """Refuse the first key left over that may change shapes or counts.

        Raises:
            ValueError: The key's name speaks of layers, heads, experts, sizes or the like.

        """
        for name in sorted(set(self._config) - self._read - _HARMLESS):
            is_set = self._config[name] is not None  # null is how Hugging Face writes "absent"
            if is_set and _SPEAKS_OF_SHAPE.search(name):
                model_type = self._config.get("model_type")
                raise ValueError(
                    f"the key {name!r} (value {_shown(self._config[name])}) is not known for "
                    f"model_type {model_type!r} and may change the model's shape; "
                    "remove it if it does not"
                )

    def _find(self, names: tuple[str, ...]) -> tuple[str, object]:
        self._read.update(names)
        present = [name for name in names if self._config.get(name) is not None]
        for other in present[1:]:
            if self._config[other] != self._config[present[0]]:
                raise ValueError(
                    f"{present[0]} is {_shown(self._config[present[0]])} but {other}, another "
                    f"name for it, is {_shown(self._config[other])}"
                )
        return (present[0], self._config[present[0]]) if present else (names[0], None)


def _refuse(name: str, wanted: str, value: object) -> NoReturn:
    raise ValueError(f"{name} must be {wanted}, not {_shown(value)}")


def _joined(names: tuple[str, ...]) -> str:
    return " or ".join(names)


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004  # a line of a message
