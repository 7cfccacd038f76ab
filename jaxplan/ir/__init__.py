"""What is computed: a step, traced to a frozen Graph."""

from .accumulate import SUMS as SUMS
from .accumulate import Parts as Parts
from .accumulate import accumulating_ops as accumulating_ops
from .accumulate import turned_sums as turned_sums
from .ends import start_shares as start_shares
from .flatten import Stated as Stated
from .flatten import call_of as call_of
from .foreign_mesh import auto_mesh_of as auto_mesh_of
from .foreign_mesh import spec_on as spec_on
from .graph import Graph as Graph
from .graph import Loop as Loop
from .graph import Op as Op
from .graph import Site as Site
from .graph import Value as Value
from .liveness import Interval as Interval
from .liveness import Lives as Lives
from .liveness import live_intervals as live_intervals
from .liveness import lives_of as lives_of
from .liveness import settled_values as settled_values
from .liveness import written_over as written_over
from .sources import users_line as users_line
from .trace import Leaf as Leaf
from .trace import Traced as Traced
from .trace import graph_of_body as graph_of_body
from .trace import positions_of as positions_of
from .trace import trace as trace
