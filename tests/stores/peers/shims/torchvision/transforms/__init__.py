"""What mosaicml-streaming and lerobot import of it."""

import numpy as np
import torch


class ToTensor:
    """Makes a float tensor `(C, H, W)` in [0, 1] of a picture of 8 bits, as torchvision's."""

    def __call__(self, picture):
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float().div(255)
