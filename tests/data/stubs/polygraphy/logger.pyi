from types import TracebackType

class LoggerVerbosity:
    def __enter__(self) -> None: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

class Logger:
    ULTRA_VERBOSE: int
    SUPER_VERBOSE: int
    EXTRA_VERBOSE: int
    VERBOSE: int
    INFO: int
    START: int
    FINISH: int
    WARNING: int
    ERROR: int
    CRITICAL: int
    module_severity: int
    colors: bool
    use_python_logging_system: bool
    log_file: str | None
    def verbosity(self, severity: int = ...) -> LoggerVerbosity: ...

G_LOGGER: Logger
