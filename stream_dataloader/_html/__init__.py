"""What notebooks show: small HTML, of plain data.

`page` escapes, cuts, lays out tables and keeps the limit of size. `cells` has the text or numbers of a lane, `pictures`
its thumbnails, and `batch` puts them together. It imports nothing of the package. Open `batch` first.
"""
