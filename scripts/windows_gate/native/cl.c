/* cl.exe as nvcc.exe sees it. The work is done by compilers.py, a Linux program, which Wine starts through
 * __wine_unix_spawnvp; that one shares no handles with Windows, so its output comes back in two files. */
#include <stdio.h>
#include <stdlib.h>
#include <windows.h>

static char* utf8(const wchar_t* text) {
    const int size = WideCharToMultiByte(CP_UTF8, 0, text, -1, NULL, 0, NULL, NULL);
    char* result = malloc(size);
    WideCharToMultiByte(CP_UTF8, 0, text, -1, result, size, NULL, NULL);
    return result;
}

static void pass_on(const wchar_t* path, DWORD stream) {
    static char buffer[1 << 16];
    const HANDLE file = CreateFileW(path, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE, NULL, OPEN_EXISTING, 0, NULL);
    DWORD got, put;
    if (file == INVALID_HANDLE_VALUE) {
        return;
    }
    while (ReadFile(file, buffer, sizeof(buffer), &got, NULL) && got > 0) {
        WriteFile(GetStdHandle(stream), buffer, got, &put, NULL);
    }
    CloseHandle(file);
    DeleteFileW(path);
}

int wmain(int count, wchar_t** words) {
    typedef LONG(WINAPI * Spawn)(char* const* words, int wait);
    const Spawn spawn = (Spawn)(void*)GetProcAddress(GetModuleHandleA("ntdll.dll"), "__wine_unix_spawnvp");
    wchar_t folder[4096], temporary[MAX_PATH], out[MAX_PATH], err[MAX_PATH];
    char** passed = calloc(count + 4, sizeof(*passed));
    LONG status;
    passed[0] = getenv("GATE_CL");
    GetCurrentDirectoryW(4096, folder);
    GetTempPathW(MAX_PATH, temporary);
    if (spawn == NULL || passed[0] == NULL || !GetTempFileNameW(temporary, L"clo", 0, out) ||
        !GetTempFileNameW(temporary, L"cle", 0, err)) {
        fprintf(stderr, "cl.exe stand-in: started outside the gate (GATE_CL is not set)\n");
        return 90;
    }
    passed[1] = utf8(folder);
    passed[2] = utf8(out);
    passed[3] = utf8(err);
    for (int i = 1; i < count; ++i) {
        passed[i + 3] = utf8(words[i]);
    }
    status = spawn(passed, 1);
    pass_on(out, STD_OUTPUT_HANDLE);
    pass_on(err, STD_ERROR_HANDLE);
    if (status == 255) { /* Wine's word for a program that did not exit by itself; nvcc.exe ends silently on it */
        fprintf(stderr, "cl.exe stand-in: a signal ended %s\n", passed[0]);
    }
    return status;
}
