"""The messages of XLA that ``executable`` reads, in the few fields that it needs; protobuf skips all others.

Source: openxla/xla as of jaxlib 0.11.2: ``util/split_proto/split_proto.proto``, ``pjrt/proto/compile_options.proto``,
``service/gpu/{gpu_executable,dense_data_intermediate}.proto``, ``service/{hlo,buffer_assignment}.proto``,
``backends/gpu/runtime/thunk.proto``, ``backends/gpu/codegen/kernels/custom_kernel.proto``,
``stream_executor/{kernel_spec,launch_dim,device_description}.proto``.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FIELDS = {
    "Manifest": "1 string type, 2 Record* records",
    "Record": "2 Empty merge, 3 Override override",
    "Override": "1 PathPart* path, 2 int32 type",
    "PathPart": "1 int32 field, 2 int64 index, 3 string string_key, 4 int64 int_key",
    "Empty": "",
    "Metadata": "1 int32 version, 2 string runtime, 7 string name",
    "ExecutableAndOptions": "1 bytes executable",
    "GpuExecutable": (
        "4 bytes binary, 6 Capability capability, 8 string name, 10 Allocations allocations, 11 Output* outputs, "
        "12 Constant* constants, 13 Thunk* thunks"
    ),
    "Capability": "1 CudaCapability cuda, 2 RocmCapability rocm",
    "CudaCapability": "1 int32 major, 2 int32 minor",
    "RocmCapability": "1 string arch",
    "Allocations": "1 Allocation* values",
    "Allocation": (
        "1 int64 index, 2 int64 size, 5 bool is_parameter, 6 int64 parameter, 7 bool live_out, 12 bool is_constant"
    ),
    "Output": "1 ShapeIndex index, 2 OutputInfo info",
    "ShapeIndex": "1 int64* values",
    "OutputInfo": "1 int64 allocation",
    "Constant": "1 string symbol, 2 Data content, 3 int64 allocation",
    "Data": "1 bytes data",
    "Thunk": "1 ThunkInfo info, 36 CustomKernelThunk kernel",
    "ThunkInfo": "1 string annotation",
    "CustomKernelThunk": "1 ShapedSlice* args, 2 bool* written, 3 CustomKernel kernel, 5 int64* zeroed",
    "ShapedSlice": "1 Slice slice",
    "Slice": "1 int64 offset, 2 int64 size, 3 int64 allocation",
    "CustomKernel": (
        "1 string name, 2 Loader loader, 3 Blocks blocks, 4 Threads threads, 5 Clusters clusters, 6 int64 shared_bytes"
    ),
    "Loader": "2 Binary binary, 3 int32 arity, 4 string name, 5 Packing packing",
    "Packing": "1 PackedArgument* arguments",
    "PackedArgument": "1 Relocation* relocations, 2 bytes data",
    "Relocation": "1 int32 kind, 2 int32 argument",
    "Binary": "1 bytes data",
    "Blocks": "2 Dim3D dim",
    "Threads": "1 Dim3D dim",
    "Clusters": "3 Dim3D dim",
    "Dim3D": "1 int64 x, 2 int64 y, 3 int64 z",
}
"""Message → its fields, each "number type name"; ``*`` marks a repeated one."""

_F = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _F.TYPE_STRING,
    "bytes": _F.TYPE_BYTES,
    "bool": _F.TYPE_BOOL,
    "int32": _F.TYPE_INT32,
    "int64": _F.TYPE_INT64,
}


def _messages() -> dict:
    file = descriptor_pb2.FileDescriptorProto(name="jax_mla_aot.proto", package="jax_mla_aot", syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            number, kind, field_name = field.split()
            scalar = _SCALARS.get(kind.rstrip("*"))
            message.field.add(
                name=field_name,
                number=int(number),
                label=_F.LABEL_REPEATED if kind.endswith("*") else _F.LABEL_OPTIONAL,
                type=_F.TYPE_MESSAGE if scalar is None else scalar,
                type_name=None if scalar is not None else f".jax_mla_aot.{kind.rstrip('*')}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"jax_mla_aot.{name}")) for name in FIELDS}


MESSAGES = _messages()
"""Message → its class."""
