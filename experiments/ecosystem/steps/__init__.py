"""Train steps of public packages, as their users write them: one module a package, imported only when asked for.

Each module names its `PACKAGE` (what must be importable) and has `CASES`, from a model's name to a function of no
arguments that returns `(step, shapes)`: a train step for one device and the ShapeDtypeStructs that it is called with.
Nothing here knows jaxplan.
"""
