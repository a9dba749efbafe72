"""Errors of the registry, all safe to pickle (args go to `super().__init__`).

RegistryError
|- InvalidNameError          a name, alias or model string that can never exist
|- NotFoundError             no such name, alias or version; or an adapter of another base
|  `- RefusedVersionError    there is one, whose files are refused, with the reason
|- RegistrationError         a folder or name is refused, with the reason; the registry is unchanged
|  `- NameTakenError         because of the name, which is that of another entry
|- ArtifactError             files of a version are missing or not allowed
|  `- DigestMismatchError    the bytes differ from the registered digest
|- QuarantinedError          the version was bad a short time ago; with the reason
|- RegistryUnavailableError  MLflow cannot be reached or returns nonsense; the last catalog stays
|  `- NoAnswerError          its server does not answer
|- CacheFullError            no space left for a local copy
`- CacheFailedError          the disk of the local copies fails, or is read-only
"""

from __future__ import annotations


class RegistryError(Exception):
    pass


class InvalidNameError(RegistryError):
    pass


class NotFoundError(RegistryError):
    pass


class RefusedVersionError(NotFoundError):
    pass


class RegistrationError(RegistryError):
    pass


class NameTakenError(RegistrationError):
    pass


class ArtifactError(RegistryError):
    pass


class DigestMismatchError(ArtifactError):
    pass


class QuarantinedError(RegistryError):
    def __init__(self, reason: str, retry_after_s: int = 1) -> None:
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.reason


class RegistryUnavailableError(RegistryError):
    pass


class NoAnswerError(RegistryUnavailableError):
    pass


class CacheFullError(RegistryError):
    pass


class CacheFailedError(RegistryError):
    pass
