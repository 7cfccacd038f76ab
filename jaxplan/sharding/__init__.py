"""How tensors can be cut: layouts, factor rules, strategies, and resharding between them."""

from .reshard import Step as Step
from .reshard import reachable as reachable
from .reshard import reshard_path as reshard_path
from .reshard import reshard_steps as reshard_steps
from .reshard import reshard_table as reshard_table
from .rule import OpShapes as OpShapes
from .rule import Rule as Rule
from .rule import RuleBuilder as RuleBuilder
from .rule import parse_rule as parse_rule
from .rules import register_rule as register_rule
from .rules import rule_for as rule_for
from .spec import NONE as NONE
from .spec import UNREDUCED as UNREDUCED
from .spec import Layout as Layout
from .spec import MeshAxes as MeshAxes
from .spec import all_places as all_places
from .spec import layout_of_places as layout_of_places
from .spec import pieces as pieces
from .spec import places_of_layout as places_of_layout
from .strategy import Strategies as Strategies
from .strategy import strategies as strategies
