"""What stands in for packages that a peer imports without need is no test."""

collect_ignore = ["shims"]
