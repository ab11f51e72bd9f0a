"""GradLoc: from a gradient spike to the tokens behind it."""
