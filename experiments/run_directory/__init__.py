"""The files of a run, which docs/design.md lists."""

from experiments.run_directory.claim import CHECKPOINTS as CHECKPOINTS
from experiments.run_directory.claim import CONFIG as CONFIG
from experiments.run_directory.claim import PARAMETERS as PARAMETERS
from experiments.run_directory.claim import check_no_export as check_no_export
from experiments.run_directory.claim import check_same as check_same
from experiments.run_directory.claim import claim as claim
from experiments.run_directory.claim import effective_config as effective_config
from experiments.run_directory.claim import read_config as read_config
from experiments.run_directory.claim import release as release
from experiments.run_directory.fields import set_field as set_field
from experiments.run_directory.files import check_access as check_access
from experiments.run_directory.files import write_bytes as write_bytes
from experiments.run_directory.files import write_json as write_json
from experiments.run_directory.files import write_text as write_text
from experiments.run_directory.lock import locked as locked
from experiments.run_directory.remote import absolute as absolute
from experiments.run_directory.remote import client_errors as client_errors
from experiments.run_directory.remote import is_remote as is_remote
from experiments.run_directory.remote import make_folder as make_folder
from experiments.run_directory.remote import run_path as run_path
from experiments.run_directory.remote import scheme_of as scheme_of
from experiments.run_directory.transfer import LocalFiles as LocalFiles
from experiments.run_directory.transfer import copy_all as copy_all
from experiments.run_directory.transfer import move as move
from experiments.run_directory.transfer import remove as remove
from experiments.run_directory.versions import note_versions as note_versions
