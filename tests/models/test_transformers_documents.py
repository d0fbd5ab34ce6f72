"""Documents in one sample of decoders of ``transformers``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planaria.common.errors import UserError
from planaria.models.llama_layers import document_mask
from planaria.models.transformers.check import require_cuttable
from small_decoders import logits, section, small, stages_of

pytest.importorskip("transformers")

END = 1
"""separator of documents"""
MASKED = ["afmoe", "gpt_oss", "falcon", "opt", "mpt", "biogpt", "xglm"]
"""architectures that do not find documents by positions that begin anew"""


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [*MASKED, "llama", "gemma2", "gpt2"])
def test_documents_of_one_sample_do_not_see_each_other(kind: str, attention: str) -> None:
    """An earlier document changes no bit of a later one, which equals itself alone but for the order of sums."""
    decoder = replace(small(kind), attention=attention)
    config = section(decoder, block_layers=(1, 2, 1))
    stages, _ = stages_of(decoder, config, 3)
    torch.manual_seed(1)
    one = torch.randint(2, 100, (2, 24))
    one[:, 12] = one[0, 5] = END
    other = one.clone()
    other[:, :12] = torch.randint(2, 100, (2, 12))
    with torch.no_grad():
        first, second = (logits(stages, each, document_mask(each, END))[:, 12:] for each in (one, other))
        alone = logits(stages, one[:, 12:])
        open_logits = logits(stages, one)[:, 12:]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(first, open_logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["gpt_oss", "falcon"])
def test_masked_documents_in_stages_equal_the_whole_model(kind: str) -> None:
    """To the last bit, whatever the cut, layers in the ends stage included."""
    from transformers.masking_utils import create_masks_for_generate

    decoder = small(kind)
    named: dict[str, torch.nn.Parameter] = {}
    tokens = torch.randint(2, 100, (2, 24))
    tokens[:, 12] = END
    mask, found = document_mask(tokens, END), []
    for ends, stages in ((0, 1), (0, 4), (2, 2)):
        config = section(decoder, ends_layers=ends)
        built, named = stages_of(decoder, config, stages)
        with torch.no_grad():
            found.append(logits(built, tokens, mask))
    whole, ids = decoder.whole(named), torch.arange(24).remainder(12).expand(2, -1)
    masks = create_masks_for_generate(whole.config, torch.zeros(2, 24, 1), None, None, ids)
    with torch.no_grad():
        expected = whole(input_ids=tokens, position_ids=ids, attention_mask=masks, use_cache=False).logits
    assert all(torch.equal(one, expected) for one in found)


def test_masked_documents_are_refused_where_they_leak() -> None:
    with pytest.raises(UserError, match=r"^data.document_mask: .*'mamba': documents of one sample see each other"):
        require_cuttable(small("mamba"), masked=True)
