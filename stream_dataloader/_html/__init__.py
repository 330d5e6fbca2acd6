"""What notebooks show: small HTML, of plain data.

`page` escapes, lays out tables and keeps the limit of size, `pictures` has thumbnails,
and `batch` all that is shown of a batch.
It imports nothing of the package. Open `batch` first.
"""
