"""What streams of media files share.

`section` reads sources and sections of them, `container` opens files with PyAV and `picture` converts pictures. It
imports nothing of the package but `errors`. Open `section` first.
"""
