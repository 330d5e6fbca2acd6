"""The contract of stores, as the tests of each format begin it."""

import pytest

from stream_dataloader.testing import StoreContract


class StoreTests(StoreContract):
    """`StoreContract` for the store that `make` returns, or a fixture `made`; `streams` are what it holds."""

    @pytest.fixture
    def made(self, tmp_path):
        return self.make(tmp_path)

    @pytest.fixture
    def expected(self):
        return self.streams

    @pytest.fixture
    def open_stream(self, made):
        yield made
        made.close()

    @pytest.fixture
    def sources(self, open_stream):
        return list(open_stream.sources)
