# The kernels' sources and flags, for everything that is built of them: the extension and the
# tests' driver.
set(DAF_KERNEL_PROCESSOR "${CMAKE_SYSTEM_PROCESSOR}")
if(APPLE AND CMAKE_OSX_ARCHITECTURES)
  set(DAF_KERNEL_PROCESSOR "${CMAKE_OSX_ARCHITECTURES}")  # a universal build has only "portable"
endif()

# Instruction sets: one file each, compiled for that set, chosen at run time.
function(daf_add_kernel_set target name)
  set(source "${CMAKE_CURRENT_BINARY_DIR}/kernels_${name}.cpp")
  configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/instruction_sets/kernels.in" "${source}"
                 @ONLY)
  target_sources(${target} PRIVATE "${source}")
  set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${ARGN}")
endfunction()

function(daf_add_kernels target)
  foreach(name arguments/channels arguments/pages instruction_sets/dispatch norms/norm_channels
          norms/row_sums reductions/ranges reductions/sums threads/parallel_for threads/passes)
    target_sources(${target} PRIVATE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${name}.cpp")
  endforeach()
  daf_add_kernel_set(${target} portable)
  target_include_directories(${target} PRIVATE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}")
  target_compile_features(${target} PRIVATE cxx_std_20)
  find_package(Threads REQUIRED)
  target_link_libraries(${target} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})

  # The bytes are part of the format: nothing may be contracted into a fused operation.
  if(MSVC)
    target_compile_options(${target} PRIVATE /fp:precise)
  elseif(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    target_compile_options(${target} PRIVATE -ffp-contract=off -fno-math-errno -fno-trapping-math
                           -Wall -Wextra -Wno-maybe-uninitialized -Wno-uninitialized)
    if(DAF_KERNEL_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
      target_compile_definitions(${target} PRIVATE DAF_X86_KERNELS)
      daf_add_kernel_set(${target} avx2 -mavx2 -mfma -mf16c)
      daf_add_kernel_set(${target} avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq
                         -mavx512vl -mprefer-vector-width=512)
    elseif(DAF_KERNEL_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
      target_compile_definitions(${target} PRIVATE DAF_NEON_KERNELS)
      daf_add_kernel_set(${target} neon)
    endif()
  endif()
endfunction()
