"""Whether the tests notice: seeded faults that would matter, each in a copy of the package, each run against few tests.

`python tests/mutants.py [TEXT] [--jobs N] [--new] [--seconds N] [--check]`, or `make mutants`; TEXT chooses faults by
what they are or where. The tree itself is never changed. What noticed which fault is kept in tests/mutants.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "mutants.json"
_COPIED = ("ds_reshard", "tests")
_DISTRIBUTED = "tests/hosts/"
"""Tests of engines, with several processes; all others are run without their distributed ones."""
_FAILED = r"^(?:FAILED|ERROR) (\S+\.py(?:::\w+)*)"
_SECONDS = 240
# An example that fails is enough; to look for the smallest takes minutes.
_NO_SHRINKING = """
from hypothesis import Phase, settings
settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate])
settings.load_profile("mutants")
"""


class Mutant(NamedTuple):
    """A fault: `text`, which is in `file` of ds_reshard once, becomes `instead`; `tests` are to fail then."""

    what: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]


TESTS = {
    "LAYOUT": "tests/unit/test_layout.py",
    "PLAN": "tests/unit/test_plan.py",
    "REGION": "tests/unit/test_region.py",
    "CHECKSUMS": "tests/unit/test_checksums.py tests/unit/test_ledger.py",
    "EXECUTOR": "tests/unit/test_executor.py",
    "PRINT": "tests/unit/test_fingerprint.py",
    "WITNESS": "tests/unit/test_witness.py",
    "SCATTER": "tests/unit/test_cuda_executor.py",
    "CRC": "tests/unit/test_crc.py",
    "ZIP": "tests/hostile/test_containers.py::test_directories_that_lie_are_refused tests/unit/test_torch_zip.py",
    "RULES": "tests/hostile/test_pickle_rules.py",
    "ZERO_CONTENT": "tests/unit/test_zero_content.py",
    "FOREIGN": "tests/formats/test_foreign_shards.py",
    "RANKS": "tests/unit/test_ranks.py",
    "NAMES": "tests/unit/test_name_map.py tests/formats/test_nanotron_deepspeed.py",
    "ZERO_DOOR": "tests/formats/test_nanotron_deepspeed.py tests/formats/test_dcp_folder.py",
    "PYTORCH_DOOR": "tests/formats/test_pytorch.py tests/formats/test_every_pair.py",
    "NANOTRON_STEPS": "tests/formats/test_nanotron_deepspeed.py",
    "OTHER_FORMATS": "tests/hosts/test_other_formats.py::test_names_of_another_framework",
    "EXCHANGE": "tests/hosts/test_collectives.py::test_what_ranks_exchange_does_not_grow_with_the_model",
    "LATEST": "tests/formats/test_pytorch.py::test_the_tag_is_the_one_that_latest_names",
    "SHARDS": "tests/formats/test_zero_shards.py",
    "COLLECTIVES": "tests/hosts/test_collectives.py::test_an_unchanged_layout_costs_two",
    "SCAN": "tests/hostile/test_unsafe_checkpoints.py tests/hostile/test_pickle_scan.py",
    "DAMAGE": "tests/hostile/test_checkpoints.py",
    "NANOTRON": "tests/formats/test_nanotron.py",
    "TO_NANOTRON": "tests/formats/test_nanotron_convert.py tests/formats/test_nanotron_deepspeed.py",
    "ZERO": "tests/formats/test_convert_any.py tests/formats/test_nanotron_deepspeed.py",
    "DCP": "tests/formats/test_dcp_folder.py",
    "PYTORCH": "tests/formats/test_pytorch.py",
    "FLAT": "tests/unit/test_flat_parameters.py",
    "POLICY": "tests/unit/test_policy_position.py tests/unit/test_resume_policy.py",
    "SCHEDULE": "tests/unit/test_schedule.py",
    "HOOKS": "tests/unit/test_hooks.py tests/unit/test_hooks_guard.py",
    "PROOF": "tests/formats/test_proof_of_files.py",
    "LISTED": "tests/formats/test_nanotron_convert.py::test_the_output_verifies_and_its_manifest_lists_every_file",
    "WORKSPACE": "tests/unit/test_workspace.py",
}

# By file of ds_reshard: what a fault does, the tests that are to fail, the lines that go, and those that come.
FAULTS = r"""
== planning/plan.py
# a part of a copy is read from one element too early [PLAN EXECUTOR]
- byte_offset=self.byte_offset + at * self.dtype.itemsize,
+ byte_offset=self.byte_offset + (at - 1) * self.dtype.itemsize,
# a part of a copy is put at the copy's beginning [PLAN EXECUTOR]
- element_offset=self.element_offset + at,
+ element_offset=self.element_offset,
# copies are joined that lie apart in the buffer [tests/unit/test_coalesce.py]
- last.element_offset + last.numel == copy.element_offset
+ last.element_offset + last.numel <= copy.element_offset
# copies of two types are joined [tests/unit/test_coalesce.py]
- and (last.dtype, last.target_dtype) == (copy.dtype, copy.target_dtype)
# the end of a fresh buffer is not zeroed [PLAN]
- if at < numel:
+ if False:
# bytes between tensors are not read [PLAN]
- if together.begin > at:
+ if False:
# the end of a record is not read [PLAN]
- if at < stop:
+ if at > stop:
# the reader of a gap is that of the element behind [PLAN]
- element = piece.start if first else piece.stop - 1
+ element = piece.stop - 1 if first else piece.start
# buffers that share their last bytes pass [PLAN DAMAGE]
- before[2] > after[1]:
+ before[2] > after[2]:
== model/layout.py
# the origin of a sub-group's tensor is dropped [LAYOUT]
- yield Piece(shard + self.first, at, end, inside + self.origin)
+ yield Piece(shard + self.first, at, end, inside)
# a piece is counted from the parameter, not from the group [LAYOUT]
- begin = number * self.chunk - self.phase
+ begin = number * self.chunk
# shards behind the wide ones keep their width [LAYOUT PLAN]
- end - max(0, number + 1 - self.wide)
+ end - max(0, number - self.wide)
# the shard of a narrow element is counted from zero [LAYOUT PLAN]
- return number + self.wide, inside, self.chunk - 1
+ return number, inside, self.chunk - 1
# boxes that overlap pass [LAYOUT]
- if one.meets(box):
+ if not one.numel:
# tensors that overlap in a buffer pass [LAYOUT]
- _begin(after) if flat else after.cut.origin
+ _end(after) if flat else after.cut.origin + after.numel
# the first tile that a region meets is left out [LAYOUT PLAN]
- self._tiles[bisect_right(self._ends, begin) :
+ self._tiles[bisect_right(self._ends, begin) + 1 :
== model/index.py
# elements that lie in no file are not told [tests/unit/test_index.py]
- if located != wanted.numel:
+ if located > wanted.numel:
# a shard that lacks a buffer is passed over [tests/unit/test_index.py]
- if fault not in self.faults:
-                 self.faults.append(fault)
-         return extent
+ return extent
# part of an extent begins at its first byte [PLAN]
- self.byte_offset + element_offset * self.dtype.itemsize
+ self.byte_offset + element_offset
== model/region.py
# the second region's run begins where the first's does [REGION]
- second_offset=start - other, numel=stop - start
+ second_offset=start - one, numel=stop - start
# an index is taken for a column of a narrower box [REGION]
- position = position * size + (i - offset)
+ position = position * size + i
# the last row of a region is left out of its extent [REGION LAYOUT]
- offset + last % size + 1
+ offset + last % size
== model/content.py
# an entry beside the model takes the place of another [tests/unit/test_content.py]
- entries[".".join(path)] = value
+ at[key] = {path[-1]: value}
# one group's rate is every group's [tests/unit/test_content.py]
- rows = [{key: state[key][number] for key in PER_GROUP}
+ rows = [{key: state[key][0] for key in PER_GROUP}
# states of a parameter are taken for its weight [tests/unit/test_content.py]
- if key.kind != WEIGHT:
+ if key.kind == MASTER:
# a tensor of the script is one of the model's weights [tests/unit/test_content.py]
- key.kind == WEIGHT and key.name not in self.beside
+ key.kind == WEIGHT
# a folder named by its step has the step for a tag [tests/unit/test_content.py]
- if name == str(self.steps) else name
+ if name is None else name
# values are found by the last of their keys [tests/unit/test_content.py]
- flattened(part, (*path, key))
+ flattened(part, (key,))
== containers/crc.py
# a slice's checksum is shifted by bits for bytes [CRC]
- _power_of_x(8 * nbytes_after)
+ _power_of_x(nbytes_after)
# a pattern is repeated once less [CRC]
- if count & 1:
+ if count & 1 and whole:
== containers/zip_directory.py
# a member that begins inside another passes [ZIP]
- if start < free_from:
+ if start < 0:
# a name that is there twice passes [ZIP tests/hostile/test_polyglots.py]
- if name in found:
+ if name in found and not name:
# bytes behind the last entry pass [ZIP]
- if at != len(directory):
+ if at > len(directory):
# another checksum in the header passes [ZIP]
- or crc not in (0, member.crc32):
+ or crc == -1:
== containers/torch_zip.py
# the checksum of a small tensor is not compared [ZIP]
- if recorded is None or (found := crc32(data)) == recorded:
+ if recorded is None or (found := crc32(data)) >= 0:
# big-endian files are read as they are [ZIP]
- if order != b"little":
+ if order not in (b"little", b"big"):
== containers/pickle_rules.py
# what acts may be trusted [RULES]
- (dotted in self.trusted and not acts(dotted))
+ dotted in self.trusted
# functions of torch that load files hold data [RULES]
- return any(dotted == one or
+ return all(dotted == one or
# a class that holds data is not told from a function [RULES]
- if root in _HOLDING and (last[:1].isupper() or root == "array"):
+ if root in _HOLDING:
== execution/threads.py
# a read goes on where it began [EXECUTOR]
-             offset += got
# a file that ended early gives what memory held [EXECUTOR]
- self._fault(ended_early(batch.record.path, batch.byte_offset, batch.nbytes, offset))
+ pass
# scratch memory is used from its beginning by each copy [EXECUTOR PLAN]
- used += copy.nbytes
+ used += 0
# copies that lie apart in a file are read as one [EXECUTOR PLAN]
- and pending[-1].byte_offset + pending[-1].nbytes == copy.byte_offset
# gaps are not read [EXECUTOR PLAN]
- for check in cut_checks(plan.checks, self.chunk_nbytes):
+ for check in cut_checks(plan.checks[:0], self.chunk_nbytes):
== execution/checksums.py
# a record that one rank read whole is not compared [CHECKSUMS]
- elif item.crc32 != item.record.crc32:
+ elif item.crc32 is None:
# a record that several ranks read is not compared [CHECKSUMS]
- elif crc != record.crc32:
+ elif crc < 0:
# spans that overlap count as whole [CHECKSUMS]
- if joined and joined[-1][1] == start:
+ if joined and joined[-1][1] >= start:
# a record that is read again passes [CHECKSUMS]
- if crc != record.crc32 or left:
+ if left:
# a slice is combined without what follows it [CHECKSUMS]
- shift(part.crc32, record.nbytes - part.byte_offset - part.nbytes)
+ shift(part.crc32, record.nbytes - part.byte_offset)
== execution/buffers.py
# bytes of a tensor that is checked in part are not compared [tests/unit/test_index.py]
- raise_faults(read_again([record]), subject=f"reading {storage.path}")
+ read_again([record])
== execution/fingerprint.py
# blocks of a tensor may change places [PRINT]
- return _factors(numpy.arange(number), _FIRST_BLOCK + first)
+ return _factors(numpy.arange(number) * 0, _FIRST_BLOCK)
# a part that begins inside a word is summed from its beginning [PRINT]
- part = bytes(lead) + bytes(part) + bytes(-(lead + len(part)) % 4)
+ part = bytes(part) + bytes(-len(part) % 4)
# bytes that went elsewhere count as the tensor's [WITNESS]
- return 0 <= element_offset - self.element_offset < self.room
+ return True
# bytes that are cast count as they lie in the file [WITNESS PLAN]
- if copy.dtype is copy.target_dtype:
+ if copy.dtype is not None:
== execution/scatter.py
# a row is dealt out at its source's place [SCATTER]
- index_copy_(0, places[row] + inside,
+ index_copy_(0, sources[row] + inside,
# units are as wide as the blocks, and not as their steps [SCATTER]
-         common = gcd(common, *block.source_steps[:-1], *block.target_steps[:-1])
== formats/zero/layout.py
# flat groups are padded to the size, not to twice it [LAYOUT ZERO]
- return -(-numel // (ALIGNMENT_FACTOR * dp)) * ALIGNMENT_FACTOR
+ return -(-numel // dp)
# a stage-3 share is rounded down [LAYOUT ZERO]
- return -(-prod(shape) // dp)
+ return prod(shape) // dp
# gaps between parameters are dropped [LAYOUT PLAN]
- at += prod(shape) + (gaps[i] if gaps else 0)
+ at += prod(shape)
== formats/zero/shards.py
# a partition of another size passes [SHARDS]
- if partition.fp32.numel not in allowed:
+ if not allowed:
# files of several steps pass [SHARDS]
-                 if one != other:
+                 if one is None:
# one shard copied over another passes [SHARDS]
- if marks in seen:
+ if name in seen:
== formats/zero/target.py
# a sub-group ends one parameter late [ZERO]
-         if numel >= most:
+         if numel > most:
# a parameter's place in its partition is that in itself [ZERO]
- "start": piece.element_offset}
+ "start": piece.start}
== formats/zero/content.py
# the steps are those of the parameter that was stepped least [ZERO_CONTENT]
- int(max((step
+ int(min((step
# the other names of tied parameters are dropped [ZERO_CONTENT]
- for name, first in content.tied.items())
+ for name, first in content.tied.items() if not first)
# a weight that is its own master is looked for among the states [ZERO_CONTENT FOREIGN]
- held.origin.kind == WEIGHT:
+ held.origin.kind == MASTER:
# the number of shards of a master is not the weight's [ZERO_CONTENT]
- shards[family] = shards[place.family]
+ shards[family] = 1
# states of another shape than the weight's pass [ZERO_CONTENT]
- or held.shape != weights[name].shape:
+ or held.shape is None:
# states that are no fp32 pass [ZERO_CONTENT]
- elif held.dtype is not ElementType.FLOAT32:
+ elif held.dtype is None:
# parameters of one group and several steps pass [ZERO_CONTENT]
- != canonical(dict(scalars.get(first, {}))):
+ != canonical(dict(scalars.get(name, {}))):
# members without a state pass, as if they were frozen [ZERO_CONTENT]
- sorted(members - trained.keys() - scalars.keys())
+ sorted(members - members)
# masters that are missing are made of 16-bit weights [ZERO_CONTENT]
- MASTER not in trained.get(name, ())
+ name not in weights
== formats/zero/door.py
# each tensor is read from the one of its own name [ZERO_DOOR]
- content.tensors[wanted].origin
+ wanted
# what an optimizer of DeepSpeed cannot hold is written [ZERO_DOOR]
- *optimizer_faults(content))
+ )
# what the source says that it lacks is written [ZERO_DOOR]
- (*content.faults, *optimizer
+ (*optimizer
== formats/dcp/door.py
# the number of files is the saving run's [DCP]
- (content.ranks or 1) if asked.dp is None else asked.dp
+ content.ranks or 1
== formats/pytorch/door.py
# weights are the 16-bit ones, not their masters [PYTORCH_DOOR]
- .get(MASTER, held)
+ .get(WEIGHT, held)
# numbers of parameters begin anew in each group [PYTORCH]
- range(len(state), len(state) + len(group.members))
+ range(len(group.members))
# states of a number are those of another group's parameter [PYTORCH]
- state[number][kind] = new_tensor(str(key), held.shape, held.dtype)
+ state.setdefault(0, {})[kind] = new_tensor(str(key), held.shape, held.dtype)
== formats/nanotron/door.py
# each tensor is read from the one of its name in --like [TO_NANOTRON]
- adoption.origins[wanted]
+ wanted
# latest.txt names the step of --like [NANOTRON_STEPS]
- dict.fromkeys(target.pointers, tag)
+ target.pointers
== formats/dcp/checkpoint.py
# a sharded chunk's type and shape are not compared [DCP DAMAGE]
- or (held.dtype.label, held.shape) != (dtype, chunk.size):
+ or held.shape is None:
== formats/dcp/target.py
# rows of the last file are lost where they do not divide [DCP]
- rows = -(-shape[0] // files)
+ rows = max(1, shape[0] // files)
# hyper-parameters that are tensors are not written [DCP]
-                 if isinstance(setting, ScalarTensor):
+                 if setting is None:
== formats/pytorch/checkpoint.py
# a parameter's number is its weight's, whatever the shape [PYTORCH]
- elif isinstance(value, TensorRecord) and value.shape == weights[name].shape:
+ elif isinstance(value, TensorRecord):
# the names of the numbers are sorted [PYTORCH]
- told: list[object] = [name for group in groups for name in group.get("param_names", ())]
+ told: list[object] = sorted(name for group in groups for name in group.get("param_names", ()))
# a file that does not hold what its index says passes [PYTORCH]
- if wanted != set(tensors):
+ if not wanted:
== formats/nanotron/names.py
# tensor and data ranks change places in a file's number [NANOTRON]
- return (rank.pp * self.tp + rank.tp) * self.dp_files + rank.dp
+ return (rank.pp * self.dp_files + rank.dp) * self.tp + rank.tp
# an optimizer file that is missing is not told [NANOTRON]
- for rank in topology.ranks if rank not in held]
-     beyond
+ for rank in topology.ranks if rank is None]
+     beyond
== formats/nanotron/slices.py
# a chunk's part is the rank's of the whole dimension [NANOTRON TO_NANOTRON]
- whole: Slice = (at + rank * part, at + (rank + 1) * part)
+ whole: Slice = (rank * part, (rank + 1) * part)
== formats/nanotron/arrangement.py
# groups of the joined stages are in the reverse order [TO_NANOTRON]
- return (Stage(groups=tuple(kept)),)
+ return (Stage(groups=tuple(reversed(kept))),)
== formats/fsdp/flat_parameters.py
# the last shard of a flat parameter is rounded away [FLAT]
- return -(-max(member.stop for member in unit.values()) // ranks)
+ return max(member.stop for member in unit.values()) // ranks
# the parts of a parameter begin at the flat parameter's beginning [FLAT]
- min(max(at - member.offset, 0), prod(member.shape))
+ min(max(at, 0), prod(member.shape))
# the boxes of a part all begin at its first element [FLAT]
-                     at += part.numel
+                     at += 0
# units whose parameters overlap pass [FLAT]
- if member.offset < at:
+ if member.offset < 0:
== operations/comparison.py
# tensors that differ are told to be equal [NANOTRON DAMAGE]
-     if found.first is None:
+     if found is not None:
# hyper-parameters of param groups are not compared [PROOF]
- yield from differences(where, _read(group.hyperparameters), _read(b[other].hyperparameters))
+ yield from ()
== operations/verification.py
# what the manifest says of a file's bytes is not compared [LISTED]
- if found != known.get("crc32"):
+ if not found:
# a file that the manifest does not list passes [PROOF]
- sorted(set(self._files) - set(self.known))
+ sorted(set(self.known) - set(self.known))
# records that are not what was written pass [DAMAGE]
- for fault in self.ledger.mismatches():
+ for fault in self.ledger.mismatches()[:0]:
== operations/name_map.py
# a parameter has the last of its new names, and is tied to the first [NAMES]
- new[name] = others[0]
+ new[name] = others[-1]
# param groups stay in the order of the source [NAMES]
- key=lambda number: _first(saved[number], order)
+ key=lambda number: number
# the schedule's rows stay in the order of the source [NAMES]
- schedule.groups[number] for number in numbers
+ schedule.groups[number] for number in sorted(numbers)
# two parameters of one new name pass [NAMES]
- if len(names) > 1:
+ if len(names) > 2:
# a name that is given twice passes [NAMES]
- if name in names:
+ if not name:
# parameters that are not in the map pass [NAMES]
- sorted(known - set(self.names))
+ sorted(known - known)
== operations/source.py
# a folder is opened though a file beside it acts [SCAN]
- if fault.error in UNSAFE]
+ if fault.error is None]
# the tag is what latest_universal says [LATEST]
- names = ("latest", "latest_universal",
+ names = ("latest_universal", "latest",
== operations/ranks.py
# what the last step found is raised, and not what the first did [RANKS]
- min(failed, key=lambda one: one.step)
+ max(failed, key=lambda one: one.step)
# what a rank raises names its own faults alone [RANKS]
- for one in failed if one.step == first.step
+ for one in failed if one is first and self.failed
# work goes on after a failure [RANKS]
- return attempt(work)[0] if always else None
+ return attempt(work)[0]
# a rank that cannot tell what it read is passed over [RANKS]
- len(said) == len(sums) and crc == 0
+ crc == 0
# a record that was read in part is whole [RANKS]
- and sum(one.spans for one in said) % 2**64 == 0
# changed bytes cancel in the sums of all ranks [RANKS]
- total ^= record.crc32
+ total = 0
== operations/workspace.py
# a manifest that was changed is believed [WORKSPACE]
-     if expected != found:
+     if found is None:
# what another conversion left is gone on with [WORKSPACE]
- if found != self._conversion:
+ if not found:
# an output inside the source is written [WORKSPACE]
- or target.startswith(source + os.sep)
== operations/conversion.py
# parts that were not moved are not missed [PROOF]
- if found.nbytes != placement.numel * placement.dtype.itemsize:
+ if found.nbytes > placement.numel * placement.dtype.itemsize:
# a conversion commits files whose records are damaged [PROOF]
- raise_faults(faults, subject=subject)
-             raise_faults(read_again(again), subject=subject)
+ read_again(again)
== operations/pickles.py
# files that have not been scanned count as passed [SCAN]
- if os.path.abspath(path) in rules.passed:
+ if os.path.abspath(path) not in rules.passed:
== resume/policy.py
# finetune keeps the moments [POLICY]
- return self.optimizer == "load" and not self.finetune
+ return self.optimizer == "load"
# a reset iteration keeps the schedule's position [POLICY]
- if self.iteration == "reset":
-             return False
+ if self.iteration == "reset":
+             return True
# two places that differ: the first is taken [POLICY]
- if _comparable(first.values[key]) != _comparable(value):
+ if key not in first.values:
# ranks that were given other policies go on [POLICY]
-         if len(ranks) > 1:
-             (first
+         if len(ranks) > len(policies):
+             (first
== resume/schedule.py
# warm-up ends one step late [SCHEDULE]
-         if b < steps:
-             return warming(b)
-         return 1.0
+         if b <= steps:
+             return warming(b)
+         return 1.0
# the cosine is one step behind [SCHEDULE]
- (b - steps + 1) / max(1, total - steps)
+ (b - steps) / max(1, total - steps)
# the second half of a cycle is as long as the first [SCHEDULE]
- second = float(second) if _is_number(second) else first
+ second = first
== hooks/guard.py
# another signature passes [HOOKS]
- if found[: len(expected)] == expected:
+ if found[: len(expected)] != []:
# another version passes [HOOKS]
- if version is not None and hooks.covers(version):
+ if version is not None:
# an inherited method stays behind after removal [HOOKS]
- inherited=holder is not owner)
+ inherited=False)
== hooks/installation.py
# a wrapper above ours still reaches us after removal [HOOKS]
- if installation.active else original(*args, **kwargs)
+ if installation else original(*args, **kwargs)
# another library's wrapper is taken off with ours [HOOKS]
- if self.site.holds(self.value):
+ if self.site is not None:
== hosts/deepspeed/prepare.py
# masters that are weights are looked for among the masters [FOREIGN]
- family.removeprefix(SAME_BYTES)
+ family
# shards of several saves of another format pass [FOREIGN]
- return self._opened.opened.compare()
+ return ()
# a damaged shard of another format has no buffers [FOREIGN]
- raise_faults(self._opened.index.faults,
+ raise_faults((),
# shards of another format are opened as ZeRO's [FOREIGN]
- ForeignShards(checkpoint) if checkpoint.foreign else
# a folder of another format is left to DeepSpeed [OTHER_FORMATS]
- if checkpoint.foreign:
-         return False
+ if checkpoint.foreign:
+         return True
== hosts/deepspeed/find_checkpoint.py
# names of a map are checked, and not applied [FOREIGN]
- renamed.applied(content) if renamed is not None else content
+ content
# faults of a map of names are passed over [FOREIGN]
- list(renamed.faults(content)) if renamed is not None else []
+ []
== hosts/deepspeed/load.py
# details are gathered though nothing differs [COLLECTIVES]
- (failed or _shards_differ(said))
+ said
# ranks say all that their shards say, and no digest [EXCHANGE]
- _digest(_told_by_all(said, states=prepared is not None))
+ repr(_told_by_all(said, states=prepared is not None)).encode()
"""


def _read(faults: str) -> Iterator[Mutant]:
    """The faults of a text in the form of FAULTS."""
    file = what = tests = ""
    sides: dict[str, list[str]] = {}
    for line in [*faults.strip().splitlines(), "# end []"]:
        mark, _, rest = line.partition(" ")
        if mark in "-+":
            sides.setdefault(mark, []).append(rest)
            continue
        if sides:
            named = tuple(test for name in tests.split() for test in TESTS.get(name, name).split())
            yield Mutant(what, file, "\n".join(sides["-"]), "\n".join(sides.get("+", ())), named)
            sides = {}
        if mark == "==":
            file = rest
        else:
            what, _, tests = rest.removesuffix("]").partition(" [")


MUTANTS = tuple(_read(FAULTS))


def times_in(package: Path, mutant: Mutant) -> int:
    """How often the text of a fault is in its file; 0 where there is no such file."""
    path = package / mutant.file
    return path.read_text(encoding="utf-8").count(mutant.text) if path.is_file() else 0


def _pytest(mutant: Mutant | None, tests: Sequence[str]) -> tuple[int, str]:
    """The exit status of tests of a copy with a fault, or without any, and what pytest printed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        place = Path(folder)
        for name in _COPIED:
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.iterdir():
            if path.name not in _COPIED and not path.name.startswith("."):
                (place / path.name).symlink_to(path)
        with open(place / "tests" / "conftest.py", "a", encoding="utf-8") as conftest:
            conftest.write(_NO_SHRINKING)
        if mutant is not None:
            file = place / "ds_reshard" / mutant.file
            file.write_text(file.read_text(encoding="utf-8").replace(mutant.text, mutant.instead), encoding="utf-8")
        known = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        alone = any(not test.startswith(_DISTRIBUTED) for test in tests)
        chosen = "not distributed and not gpu" if alone and mutant is not None else "not gpu"
        given = ["-x", "-q", "-p", "no:cacheprovider", "-m", chosen, *tests]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *given],
                cwd=folder,
                env=known,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1, f"no end after {_SECONDS} seconds"
        return done.returncode, done.stdout + done.stderr


def noticed_by(mutant: Mutant) -> str | None:
    """The first test that fails because of a fault; None where none does. RuntimeError where tests did not run."""
    code, printed = _pytest(mutant, mutant.tests)
    failed = re.search(_FAILED, printed, re.MULTILINE)
    if code == 0 or (code == 1 and failed is not None):
        return failed[1] if failed is not None else None
    raise RuntimeError(f"{mutant.what}: pytest ended with {code}\n{printed[-2000:]}")


Row = dict[str, str | None]


def _row(mutant: Mutant) -> Row:
    started = time.monotonic()
    found = noticed_by(mutant)
    said = f"noticed by {found}" if found else "NOT NOTICED"
    print(f"{time.monotonic() - started:4.0f} s {said}: {mutant.what} ({mutant.file})", flush=True)
    return {"what": mutant.what, "file": mutant.file, "noticed_by": found}


def _known() -> dict[str | None, Row]:
    """The rows of the results by what their faults do."""
    return {one["what"]: one for one in json.loads(RESULTS.read_text(encoding="utf-8"))} if RESULTS.exists() else {}


def _keep(row: Row) -> None:
    """Put a row into the results, beside those of other faults of the list."""
    known = {**_known(), row["what"]: row}
    kept = [known[one.what] for one in MUTANTS if one.what in known]
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n", encoding="utf-8")


def _fail_without_a_fault(rows: Sequence[Row]) -> list[str]:
    """The tests, of those that noticed faults, that fail without any: file by file, as they also ran."""
    tests = sorted({row["noticed_by"] for row in rows if row["noticed_by"]})
    found: list[str] = []
    for file, of_file in groupby(tests, key=lambda test: test.partition("::")[0]):
        code, printed = _pytest(None, list(of_file))
        if code:
            found += sorted(set(re.findall(_FAILED, printed, re.MULTILINE))) or [f"{file}: {printed[-1000:]}"]
    return found


def main() -> int:
    """The number of faults that no test noticed, as a status of 0 or 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="", help="faults with this text in their file or description")
    parser.add_argument("--jobs", type=int, default=2, help="how many are run at once (2)")
    parser.add_argument("--new", action="store_true", help="only those that are not noticed in the results")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin none after these; --new goes on")
    parser.add_argument("--check", action="store_true", help="no fault: do the tests that noticed faults pass?")
    asked = parser.parse_args()
    known = {what for what, row in _known().items() if row["noticed_by"]} if asked.new else set()
    chosen = [one for one in MUTANTS if asked.text in f"{one.file}: {one.what}" and one.what not in known]
    rows, end = [], time.monotonic() + (0 if asked.check else asked.seconds)
    with ThreadPoolExecutor(asked.jobs) as pool:
        for row in pool.map(lambda one: _row(one) if time.monotonic() < end else None, chosen):
            if row is not None:
                rows.append(row)
                _keep(row)
    failing = _fail_without_a_fault(list(_known().values()) if asked.check else rows)
    if failing:
        print("these fail without a fault:", *failing, sep="\n")
        return 1
    missed = [row for row in rows if not row["noticed_by"]]
    print(
        f"{len(rows) - len(missed)} of {len(rows)} faults were noticed, {len(chosen) - len(rows)} not run; "
        f"without a fault the same tests pass"
    )
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
