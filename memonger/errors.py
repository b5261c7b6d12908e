"""Every error memonger raises on purpose. Each message says what is wrong, where, and what would work."""


class MemongerError(Exception):
    """Base of all errors a user can meet. The command line prints its text and exits with status 1."""


class LoadError(MemongerError):
    """A model can't be read, or its shapes can't be made static."""


class PlanError(MemongerError):
    """A model can be read but not planned."""


class LayoutError(MemongerError):
    """Buffers can't be laid out: bad problem, or no room."""


class VerificationError(MemongerError):
    """A plan is wrong: it would read a dead value, overlap two live ones, or leave its arena."""


class PlanFileError(MemongerError):
    """A plan file is malformed, of a newer format, or not the plan of this model, machine or runtime."""


class RuntimeUnavailableError(MemongerError):
    """onnxruntime, or the device asked for, isn't there. The message names the extra to install."""


class SessionError(MemongerError):
    """A session can't run: wrong inputs, an order the runtime didn't follow, a shape no plan was made for."""
