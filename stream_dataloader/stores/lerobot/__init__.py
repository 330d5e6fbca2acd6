"""LeRobot datasets: episodes of a robot as streams of dicts.

`info` reads the description, `tables` find the episodes, and `frames` reads cameras. Open `store` first.
"""

from stream_dataloader.stores.lerobot.store import LeRobotStore

__all__ = ["LeRobotStore"]
