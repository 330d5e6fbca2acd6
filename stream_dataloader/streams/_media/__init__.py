"""What streams of media files share.

`section` checks sources and options, `container` opens files with PyAV, `picture` converts pictures and `items` hands
them out, `still` decodes single images, `names` puts names in order, `extent` finds files that were cut off, `opencv`
imports OpenCV and `av_versions` holds what differs between versions of PyAV. Open `section` first.
"""
