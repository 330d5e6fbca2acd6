"""The real packages take what a batch says under their names: torchrl's modules, transformers' models and collator."""

from itertools import pairwise

import pytest
import torch
from windows_of_streams import LANES, LENGTHS, STEPS, WINDOWS, batches_of, differing, opening

from stream_dataloader import recurrent

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings are theirs
WIDTH = 6


def features(source):
    return torch.randn(LENGTHS[source], WIDTH, generator=torch.Generator().manual_seed(source))


def tokens(source):
    return torch.randint(90, (LENGTHS[source],), generator=torch.Generator().manual_seed(source))


@WINDOWS
@pytest.mark.parametrize("backend", ["pad", "scan"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@torch.no_grad()
def test_torchrl_gives_each_stream_what_it_has_alone(kind, backend, windows):
    rl = pytest.importorskip("torchrl.modules")
    from tensordict import TensorDict

    torch.manual_seed(0)
    names = ["h", "c"] if kind == "lstm" else ["h"]
    module = (rl.LSTMModule if kind == "lstm" else rl.GRUModule)(
        input_size=WIDTH,
        hidden_size=8,
        num_layers=2,
        in_keys=["x", *names],
        out_keys=["y", *(("next", name) for name in names)],
        recurrent_backend=backend,
        default_recurrent_mode=True,
    )
    network = module.lstm if kind == "lstm" else module.gru

    alone = [network(features(source).unsqueeze(0))[0][0] for source in range(len(LENGTHS))]

    def run(batches, keep, given_at=slice(0, 1)):
        carried, wrong = {name: torch.zeros(LANES, 2, 8) for name in names}, 0
        for batch in batches:
            states = torch.zeros(LANES, STEPS, len(names), 2, 8)
            states[:, given_at] = torch.stack([keep(batch, carried[name]) for name in names], 1).unsqueeze(1)
            values = {name: states[:, :, i] for i, name in enumerate(names)}
            given = {"x": batch.data.transpose(0, 1), "is_init": recurrent.is_init(batch), **values}
            answer = module(TensorDict(given, [LANES, STEPS]))
            carried = {name: answer["next", name][:, -1] for name in names}
            wrong += differing(batch, answer["y"].transpose(0, 1), alone)
        return wrong

    def started_zeroed(batch, state):
        return state * ~batch.reset.view(-1, 1, 1)

    batches = batches_of(opening(features), windows)
    assert not run(batches, started_zeroed)
    if backend == "pad":  # which is the default; it does not zero the state at `is_init`
        assert run(batches, lambda batch, state: state)
        assert bool(run(batches, started_zeroed, slice(None))) == (windows == "packed")


@WINDOWS
@pytest.mark.parametrize("attention", ["sdpa", "given cuts"])
@torch.no_grad()
def test_a_model_of_transformers_attends_within_segments(attention, windows):
    transformers = pytest.importorskip("transformers")
    from torch.nn.functional import scaled_dot_product_attention

    def by_cuts(module, query, key, value, attention_mask, *, cu_seq_lens_q, cu_seq_lens_k, scaling, **kwargs):
        """What flash-attention's kernel does: each sequence by itself."""
        spans = zip(pairwise(cu_seq_lens_q.tolist()), pairwise(cu_seq_lens_k.tolist()), strict=True)
        parts = [
            scaled_dot_product_attention(
                query[:, :, a:b], key[:, :, c:d], value[:, :, c:d], is_causal=True, scale=scaling, enable_gqa=True
            )
            for (a, b), (c, d) in spans
        ]
        return torch.cat(parts, 2).transpose(1, 2), None

    transformers.AttentionInterface.register("given cuts", by_cuts)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=90,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    model = transformers.LlamaModel(config).eval()

    def run(input_ids, position_ids, cuts):
        lengths = {"max_length_q": STEPS, "max_length_k": STEPS}
        return model(
            input_ids, position_ids=position_ids, cu_seq_lens_q=cuts, cu_seq_lens_k=cuts, use_cache=False, **lengths
        ).last_hidden_state

    for batch in batches_of(opening(tokens), windows):
        within = "segment" if attention == "sdpa" else "stream"  # rotary: only differences of positions count
        outputs = run(
            batch.flatten_lanes(batch.data), recurrent.position_ids(batch, within), recurrent.cu_seqlens(batch)
        )
        outputs = batch.unflatten_lanes(outputs)
        for b in range(LANES):
            for source in set(batch.source_index[:, b].tolist()) - {-1}:
                own = batch.source_index[:, b] == source
                alone = run(batch.data[own, b].unsqueeze(0), None, torch.tensor([0, int(own.sum())]))
                assert torch.allclose(outputs[own, b], alone[0], atol=1e-5)
