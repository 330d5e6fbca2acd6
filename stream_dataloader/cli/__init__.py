"""The command line, and the demo it runs.

`main` parses arguments, `demo` streams a folder of clips and `film` draws what the lanes read. It may import all of the
package; nothing imports it. Open `main` first.
"""
