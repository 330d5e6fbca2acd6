"""LeRobot datasets: episodes of a robot as streams of dicts, read by pyarrow and PyAV alone.

`info` says what a dataset holds, `episodes` where each lies, `rows` reads its table, `frames` its cameras, `store` puts
them together. It imports `_base`, `stores.parquet` and `streams`. Open `store` first.
"""

from stream_dataloader.stores.lerobot.store import LeRobotStore

__all__ = ["LeRobotStore"]
