"""An exported model, such as several experts in one, as a folder that ``transformers`` can load."""

from __future__ import annotations

from pathlib import Path

from planaria.common.errors import UserError
from planaria.data.tokenizer import Tokenizer
from planaria.models.huggingface import export_model
from planaria.models.stages import Llama
from planaria.runtime.engine.weights import open_weights


def export_again(folder: Path, to: Path) -> Path:
    """Write the model in ``folder``, without what lies beside it, as a Llama or a Mixtral.

    :raises UserError: when its routers have a term that Mixtral's have not, naming it.
    """
    weights = open_weights(folder)
    model = _as_mixtral(folder, weights.model())
    end = None if weights.tokenizer is None else Tokenizer.open(weights.tokenizer).end
    export_model(model, to, weights.tokenizer, end, weights.usage)
    return to


def _as_mixtral(folder: Path, model: Llama) -> Llama:
    """The same model without biases, where those of each router are one number: softmax and top-k do not see it."""
    if model.routing is None or not model.routing.bias:
        return model
    state = model.global_state()
    for name, bias in state.items():
        if name.endswith(".router.bias") and (low := float(bias.min())) != (high := float(bias.max())):
            raise UserError(
                f"{folder}: {name} is {low:.3g} to {high:.3g}: a router of Mixtral has no bias, and its input no "
                "constant channel that could hold one; merge again with --no-bias"
            )
    plain = Llama(model.config, routing=model.routing._replace(bias=False), initialise=False)
    plain.load_global_state({name: tensor for name, tensor in state.items() if not name.endswith(".router.bias")})
    return plain
