"""Tests against other packages, in an environment of their own: `.ci/store_peers`."""
