#pragma once
extern "C" {
int __cdecl isspace(int);
int __cdecl isdigit(int);
int __cdecl isalpha(int);
int __cdecl isalnum(int);
int __cdecl tolower(int);
int __cdecl toupper(int);
}
