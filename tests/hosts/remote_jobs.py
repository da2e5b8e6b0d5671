"""Loads by URL, in the rank workers: with the environment that names the store."""

from __future__ import annotations

import os
from typing import Any

import jobs
import refused_jobs


def load(environment: dict[str, str], **given: Any) -> dict[str, Any]:
    os.environ.update(environment)
    return jobs.load(**given)


def load_refused(environment: dict[str, str], **given: Any) -> dict[str, Any]:
    os.environ.update(environment)
    return jobs.load_refused(**given)


def load_with_feature(environment: dict[str, str], **given: Any) -> tuple[str, str]:
    os.environ.update(environment)
    return refused_jobs.load_with_feature(**given)
