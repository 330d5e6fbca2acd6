"""`ModelInputs`: a batch as the keyword arguments of a model, as trainers of other projects hand it over.

Guarantee: the values are the batch's own; only their first two axes are exchanged, and only if that is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from stream_dataloader._kept_fields import map_leaves
from stream_dataloader.batch import StreamBatch


class ModelInputs:
    """Makes keyword arguments of a model out of a `StreamBatch` whose streams yield dicts.

    Args:
        batch_first: True: the data are `(B, T, ...)`, as models of transformers take them, for the price of a copy.
            False: `(T, B, ...)`, as the loader has them, which torch's recurrent layers take.
        fields: What the model is given beside the data: names of fields of `StreamBatch`, such as `"reset"`, `"mask"`
            and `"is_start"`, or `"position_ids"`, which are the positions with 0 where padded. A dict gives them by
            the model's own names: `{"attention_mask": "mask"}`. None: those that the model's `forward` names.

    Example::

        StreamTrainer(model, args, train_dataset=loader, model_inputs=ModelInputs(fields=["reset", "position_ids"]))
    """

    #: What a `forward` may name.
    FIELDS = ("reset", "is_start", "mask", "source", "position", "position_ids", "lane")

    def __init__(self, *, batch_first: bool = True, fields: Mapping[str, str] | Iterable[str] | None = None) -> None:
        self.batch_first = batch_first
        if isinstance(fields, str):
            raise TypeError(f"fields must be names, or a dict of them, and is {fields!r}; write [{fields!r}]")
        if fields is not None and not isinstance(fields, Mapping):
            fields = {name: name for name in fields}
        self.fields: dict[str, str] | None = None if fields is None else dict(fields)
        if unknown := [name for name in (self.fields or {}).values() if name not in self.FIELDS]:
            raise ValueError(f"fields has {unknown[0]!r}, and knows {', '.join(self.FIELDS)}")

    def of(self, model: torch.nn.Module) -> ModelInputs:
        """The same, with the fields that a model's `forward` names, unless they were given."""
        if self.fields is not None:
            return self
        base = getattr(model, "get_base_model", lambda: model)()  # peft's models name nothing themselves
        named = inspect.signature(base.forward).parameters
        return ModelInputs(batch_first=self.batch_first, fields=[name for name in self.FIELDS if name in named])

    def __call__(self, batch: StreamBatch) -> dict[str, Any]:
        """The arguments."""
        if not isinstance(batch.data, dict):
            raise TypeError(
                f"a model takes arguments by name, and the streams yield no dict but a {type(batch.data).__name__}; "
                'have them yield {"input_ids": ..., "labels": ...}, or pass a function as model_inputs'
            )
        fields = self.fields or {}
        if both := [name for name in fields if name in batch.data]:
            raise ValueError(
                f"the streams yield {both[0]!r}, and the batch has a field of this name; choose what the model is "
                "given with ModelInputs(fields={name of the model: field})"
            )
        values = batch.data | {name: self._field(batch, field) for name, field in fields.items()}
        if not self.batch_first:
            return values
        return {name: map_leaves(value, _batch_first) for name, value in values.items()}

    @staticmethod
    def _field(batch: StreamBatch, name: str) -> Any:
        return batch.position.clamp(min=0) if name == "position_ids" else getattr(batch, name)


def _batch_first(leaf: Any) -> Any:
    """A leaf `(B, T, ...)`; one of lanes alone stays as it is."""
    if isinstance(leaf, torch.Tensor) and leaf.dim() > 1:
        return leaf.transpose(0, 1).contiguous()  # models of transformers call `view`
    return leaf
