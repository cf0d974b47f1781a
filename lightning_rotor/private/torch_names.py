"""Private names of torch, read in 2.11 to 2.15, under one import: ``from lightning_rotor.private import torch_names``.

Each stands in a file of what it is about; here is the list of files and names.
"""

from lightning_rotor.private.compiler import (
    COMPILED_CALL,
    COMPILER_ATTRIBUTES,
    INNER,
    CompiledCall,
    CompilerSettings,
    activation_budget,
    aot_eager_under,
    call_uncompiled,
    compilation_heard,
    compiled_call_of,
    compiled_method_of,
    compiler_settings,
    has_compiled_method,
    is_aot_eager,
    is_compiled,
    is_compiled_function,
    is_compiled_in_place,
    is_compiler_wrapper,
    is_inductor,
    keep_library_out_of_graphs,
    module_inside,
    outside_of_graphs,
    settings_told_by,
    uncompiled,
)
from lightning_rotor.private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    fake_mode,
    fake_with_value,
    forget_value,
    mode_of,
    value_of,
    with_values,
)
from lightning_rotor.private.hooks import (
    HOOKS,
    OPTIMIZER_HOOKS,
    STRUCTURE,
    any_hooks_of_all,
    gradient_hooks,
    has_backward_hooks,
    has_forward_hooks,
    has_step_hooks,
    hook_tables,
    shares_weights,
    without_hooks_of_several,
)
from lightning_rotor.private.modes import (
    TorchDispatchMode,
    attention_order,
    default_device,
    float32_precision,
    function_modes,
    is_captured,
    is_transformed,
    no_dispatch,
    set_attention_order,
    set_float32_precision,
    without_function_mode,
    without_modes,
)
from lightning_rotor.private.operators import (
    RECURRENT,
    OpOverload,
    OpOverloadPacket,
    copy_each,
    flattened,
    istft_in_parts,
    pack_sequences,
    packet_of,
    pad_sequences,
    schema_of,
    take_back,
    unflattened,
    written_arguments,
    written_by_message,
)
from lightning_rotor.private.pipelining import (
    sent_outputs_linger,
)
from lightning_rotor.private.profiler import (
    AllocationLog,
    allocation_of,
    blocks_in,
    is_profiling,
)
from lightning_rotor.private.running_backward import (
    at_end_of_backward,
    backward_keeps_graph,
    backward_number,
    backward_reaches,
    before_node,
    hooks_for_saved_tensors,
    leaf_of_node,
    name_of_node,
)
from lightning_rotor.private.running_threads import (
    global_generators,
    threads,
)
from lightning_rotor.private.tensor_facts import (
    identity_of,
    is_traceable_wrapper_subclass,
    sparse_parts,
    stamps,
    version_of,
)
from lightning_rotor.private.users_checkpoints import (
    noticed_checkpoints,
)
