"""LeRobot datasets: episodes of a robot as streams of dicts.

`info` says what there is, `tables` where, `frames` reads cameras. Open `store` first.
"""

from stream_dataloader.stores.lerobot.store import LeRobotStore

__all__ = ["LeRobotStore"]
