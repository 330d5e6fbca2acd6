"""The command line, its commands, and the demo.

`main` has the commands, `..._command` is one of them, `arguments` is what they share, `target` finds what they read,
`media` finds media in a folder, `probe` tells what a file holds,
`demo` streams a folder of clips and `film` draws what the lanes read. It may import all of the
package; nothing imports it. Open `main` first.
"""
