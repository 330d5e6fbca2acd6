"""Files of tokens. Open `store` first, then `files`."""

from stream_dataloader.stores.token.store import TokenStore

__all__ = ["TokenStore"]
