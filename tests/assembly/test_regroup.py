"""The fields of a batch are made when they are asked for."""

import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.items import bookkeeping


@pytest.mark.parametrize("workers", [0, 2])
def test_a_field_is_made_once_and_what_a_user_writes_into_it_is_in_no_other_batch(workers):
    dataset = StreamDataset([12, 12], range, 2, time_steps=3)
    for step, batch in enumerate(StreamDataLoader(dataset, workers)):
        assert not vars(batch).keys() & {"reset", "is_first", "mask", "source_index", "position"}
        assert batch.position.T.tolist() == batch.data.T.tolist() == [[3 * step + t for t in range(3)]] * 2
        assert batch.source_index.T.tolist() == [[0] * 3, [1] * 3]
        assert batch.mask.all()
        assert batch.reset.tolist() == batch.is_first[0].tolist() == [step == 0] * 2
        assert not batch.is_first[1:].any()
        for field in (batch.data, batch.position, batch.source_index, batch.mask, batch.is_first):
            field.fill_(1)
        assert batch.reset.all()
        assert batch.position.eq(1).all()
        assert pickle.loads(pickle.dumps(batch)).source_index.eq(1).all()


def test_fields_that_nobody_asked_for_go_with_copies():
    (batch,) = StreamDataLoader(StreamDataset([3, 2], range, 2, time_steps=3))
    for other in [batch.host, dataclasses.replace(batch, data=None)]:
        assert other.position.T.tolist() == [[0, 1, 2], [0, 1, -1]]
    with pytest.raises(AttributeError):
        batch.masks  # noqa: B018


def test_threads_may_ask_for_a_field_at_once():
    for batch in StreamDataLoader(StreamDataset([40, 40], range, 2, time_steps=2)):
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _, batch=batch: batch.position, range(4)))
        assert all(field is batch.position for field in found)


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("length", [2, 7])
def test_a_compiled_function_of_batches_is_not_compiled_for_each(monkeypatch, fullgraph, length):
    monkeypatch.setattr(bookkeeping.asked, "by_compiled", False)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def function(batch):
        return (batch.data * batch.mask).sum(), batch.reset.any(), batch.source_index.max(), batch.position.sum()

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=fullgraph)
    windows = "packed" if length == 2 else "aligned"
    dataset = StreamDataset([length, 7] * 20, range, 2, time_steps=3, windows=windows)
    for batch in StreamDataLoader(dataset):
        torch.testing.assert_close(compiled(batch), function(batch))
    assert len(graphs) <= (2 if fullgraph else 6)  # with what is done once for the first batch
