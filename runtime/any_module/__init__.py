"""`package.module:function`: a module of any family, described for the planner."""
