"""Runs one setting in this process: ``python -m cute_sharding.tools.estimate REQUEST RESULT``."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from cute_sharding._settings import from_environment
from cute_sharding.dtensor.switch import adapter
from cute_sharding.tools.estimate.dry_run import run
from cute_sharding.tools.estimate.programs import function_of, place_of, said


def main(request: dict[str, Any]) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message=".*random operators may not have complete support")
    settings = from_environment(os.environ)
    if settings is not None and not adapter.is_enabled():
        adapter.enable(**settings)
    try:
        step = function_of(*request.pop("function"))
    except Exception as error:
        place = place_of(error)
        return {"import": said(error), "place": None if place is None else [*place]}
    return {"runs": run(step, **request)}


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
