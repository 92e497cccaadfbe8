"""What the installed version of TensorRT has that others have not; imports tensorrt, so only after `present.require()`.

Nothing else of the package asks for the version. Code that only some versions can run stands under `if versions.HAS_…:`
in just this form, with the constant's own name: the conformance check reads these constants for every version that it
knows, and then looks only at the branch that would run. It refuses version tests in any other form.
"""

import re

import tensorrt as trt


def numbers(text: str) -> tuple[int, int]:
    """Major and minor version of a version's text, such as (10, 14) of "10.14.1.48.post1"; (0, 0) if it has none."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


VERSION = numbers(trt.__version__)

AT_LEAST_10_7 = VERSION >= (10, 7)
AT_LEAST_10_16 = VERSION >= (10, 16)
AT_LEAST_11_0 = VERSION >= (11, 0)
AT_LEAST_11_4 = VERSION >= (11, 4)

# `Refitter.release_refit_resources`, which gives back what a refit took.
HAS_RELEASE_REFIT_RESOURCES = AT_LEAST_11_4
