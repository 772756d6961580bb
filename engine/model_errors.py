"""What can be wrong with a model, by kind. `engine.model_config` has them all by name too."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be used; the message names the file or key and what to do. Base of all errors about models."""


class ModelFolderError(ModelError):
    """There is no such model: no folder of that name, and nothing on the hub."""


class ConfigFileError(ModelError):
    """A config file is missing, is not JSON, lacks a key or has a value of the wrong kind."""


class UnsupportedModelError(ModelError):
    """The model is well formed but asks for something that is not implemented."""


class UnsupportedArchitectureError(UnsupportedModelError):
    pass


class UnsupportedActivationError(UnsupportedModelError):
    pass


class UnsupportedAttentionError(UnsupportedModelError):
    """Some layer attends otherwise than over the whole context: a sliding window, chunks, a recurrent state."""


class UnsupportedRopeError(UnsupportedModelError):
    pass


class QuantisedCheckpointError(UnsupportedModelError):
    pass
