"""Stands in for a GPU's decoder: what PyAV decodes by the CPU comes as it would come from the device.

What is kept of PyAV's way: `av.open` with `hwaccel` sets a decoder up for each stream that has one, the codec context's
`is_hwaccel` and `pix_fmt` tell of it, and frames in host memory are semi-planar.
"""

import weakref

import av

SEMI_PLANAR = {
    "yuv420p": "nv12", "yuvj420p": "nv12", "yuv420p10le": "p010le", "yuv420p12le": "p012le",
}  # fmt: skip


class Around:
    """An object of PyAV with some attributes of ours."""

    def __init__(self, real, **own):
        vars(self).update(own, _real=real)

    def __getattr__(self, name):
        return getattr(self._real, name)

    def __setattr__(self, name, value):
        setattr(self._real, name, value)


class Stream(Around):
    """A video stream that a device decodes."""

    def __init__(self, real, device):
        context = Around(real.codec_context, is_hwaccel=device.has_decoder, pix_fmt="cuda")
        super().__init__(real, codec_context=context, device=device)

    def decode(self, packet=None):
        device = self.device
        number, device.packets = device.packets, device.packets + 1
        if number == device.fails_at:
            raise device.error()
        frames = self._real.decode(packet)
        if number >= device.software_from:
            vars(self.codec_context)["pix_fmt"] = self._real.codec_context.pix_fmt
            return frames
        return [self.downloaded(frame) for frame in frames]

    def downloaded(self, frame):
        name, colours = frame.format.name, frame.color_range
        if name not in SEMI_PLANAR:
            return frame
        found = frame.reformat(format=SEMI_PLANAR[name], src_color_range=colours, dst_color_range=colours, threads=1)
        found.color_primaries = found.color_trc = self.device.tags
        return Around(found, width=frame.width + 8, format=found.format) if self.device.crops else found


class Container(Around):
    """A file that is open on a device."""

    def __init__(self, real, device):
        streams = [Stream(one, device) if one.type == "video" else one for one in real.streams]
        super().__init__(real, streams=streams)
        device.opened += [weakref.ref(one) for one in streams]

    def demux(self, stream):
        return self._real.demux(stream._real)

    def close(self):
        self.streams.clear()
        self._real.close()

    def seek(self, target, *, stream, backward):
        self._real.seek(target, stream=stream._real, backward=backward)


class Device:
    """What `av.open` finds; tests set how it fails.

    Attributes:
        has_decoder: FFmpeg's decoders use it.
        tags: Primaries and transfer function of its frames; 2 is unspecified, 0 reserved.
        crops: Its frames are larger than what is shown of them.
        fails_at: The number of the packet whose decoding raises `error()`.
        software_from: The number of the packet from which on FFmpeg decodes by the CPU.
        open_errors: What the next calls of `av.open` raise.
        asked: The `HWAccel` of each call.
        opened: Weak references to the streams.
    """

    def __init__(self, patch):
        self.has_decoder, self.crops, self.packets = True, False, 0
        self.tags = 2
        self.fails_at, self.error, self.software_from = -1, None, 1 << 30
        self.open_errors, self.asked, self.opened = [], [], []
        self._open = av.open
        patch.setattr(av, "open", self.open)

    def open(self, *arguments, hwaccel=None, **options):
        if hwaccel is None:
            return self._open(*arguments, **options)
        self.asked.append(hwaccel)
        if self.open_errors:
            raise self.open_errors.pop(0)
        return Container(self._open(*arguments, **options), self)
