# CPack's settings for packaging/deb.py, which adds the files and the version.
set(CPACK_PACKAGE_NAME lockstep)
set(CPACK_PACKAGE_FILE_NAME lockstep)
set(CPACK_PACKAGE_VENDOR Lockstep)
set(CPACK_PACKAGE_CONTACT "The Lockstep authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY
    "Training framework for transformer models on many devices, on libtorch and c10d")
set(CPACK_PACKAGING_INSTALL_PREFIX /)
set(CPACK_INCLUDE_TOPLEVEL_DIRECTORY OFF)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_PACKAGE_DESCRIPTION
    "The program trains on CPUs; the Python wheel has the CUDA kernels. libtorch comes along.")
# libtorch alone has 450 MB: zstd takes seconds where xz takes minutes.
set(CPACK_DEBIAN_COMPRESSION_TYPE zstd)
