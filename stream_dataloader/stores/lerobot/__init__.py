"""LeRobot datasets: episodes of a robot as streams of dicts, read by pyarrow and PyAV alone.

`info` says what a dataset holds, `episodes` where each episode lies, `rows` reads its table, `frames` its cameras,
`parquet` opens files that may be damaged, `store` puts them together. It imports `_base`, `stores.parquet`, and of
`streams` videos and images. Open `info` first.
"""

from stream_dataloader.stores.lerobot.store import LeRobotStore

__all__ = ["LeRobotStore"]
