"""How XLA compiles in the tests; to be set before JAX is first used."""

from importlib.metadata import version

# Two pytest workers on two cores: a second thread pool in each would only get in the way. Programs here are small and
# run once, so compiling fast is worth more than running fast. Without the newer fusion emitters, and with one module of
# code instead of one for each thread, a program compiles in a quarter of the time. jax 0.12 has no older emitters.
FLAGS = "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
if tuple(map(int, version("jax").split(".")[:2])) < (0, 12):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
