"""Arrays of checkpoints in buckets: Orbax opens `gs://` by itself, `s3://` with what is here.

Orbax 0.12 takes every address but `gs://` for a local path when it opens TensorStore, whose driver
for S3 it could use. Its function that makes the specification is replaced by one that also knows
`s3://`; the retries of both kinds of buckets are bounded.
"""

import functools
import os
from typing import Any

from orbax.checkpoint._src.serialization import tensorstore_utils

# After these TensorStore gives up and the save fails; by default it tries for a quarter of an hour.
_RETRIES = {"max_retries": 10, "initial_delay": "250ms", "max_delay": "16s"}
_LOCAL_ROOT = "/s3/"  # stands for s3:// within Orbax


@functools.cache
def support_s3() -> None:
    """Makes Orbax of this process read and write arrays in `s3://`, once."""
    local_spec = tensorstore_utils.build_kvstore_tspec

    def build_kvstore_tspec(directory: str, *args: Any, **kwargs: Any) -> Any:
        address = os.fspath(directory)
        if address.startswith("s3://"):
            spec = local_spec(_LOCAL_ROOT + address.removeprefix("s3://"), *args, **kwargs)
            return _bucket_spec(spec, is_s3=True)
        return _bucket_spec(local_spec(directory, *args, **kwargs), is_s3=False)

    tensorstore_utils.build_kvstore_tspec = build_kvstore_tspec


def _bucket_spec(spec: Any, is_s3: bool) -> Any:
    """The specification with the drivers of buckets and bounded retries, at any depth."""
    if isinstance(spec, list):
        return [_bucket_spec(each, is_s3) for each in spec]
    if not isinstance(spec, dict):
        return spec
    driver = spec.get("driver")
    if is_s3 and driver == "file" and str(spec.get("path", "")).startswith(_LOCAL_ROOT):
        bucket, _, path = spec["path"].removeprefix(_LOCAL_ROOT).partition("/")
        return {"driver": "s3", "bucket": bucket, "path": path, **_s3_settings()}
    if driver == "gcs":
        return {**spec, "gcs_request_retries": _RETRIES}
    return {key: _bucket_spec(value, is_s3) for key, value in spec.items()}


def _s3_settings() -> dict[str, Any]:
    """Endpoint and region by the variables that boto reads too; TensorStore does not read them."""
    variables = os.environ
    endpoint = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL")
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION")
    settings: dict[str, Any] = {"s3_request_retries": _RETRIES}
    if "AWS_ACCESS_KEY_ID" in variables:  # else it logs an error for each file it looks for
        settings["aws_credentials"] = {"type": "environment"}
    if endpoint:
        settings |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    elif region:
        settings["aws_region"] = region
    return settings
